"""Writing into stores: from ranks, and from actors that have neither an engine nor a
process group.
"""
