"""Attention over paged KV: the interface (`base`), the backends, and `registry.get_backend`."""
