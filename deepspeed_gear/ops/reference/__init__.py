"""The definition in plain PyTorch of each op that has several implementations.

The definitions are slow and readable, and the implementations equal them bit for bit.
"""
