"""The service's protocol. `values` is what any transport answers; `exchange` is the only module that knows httpx."""
