"""One module for each way to give items their masses."""
