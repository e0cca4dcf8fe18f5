"""Writing from machines without a store: a gateway beside the store, and remote writers."""
