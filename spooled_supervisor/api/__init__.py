"""The service's protocol. `values` is what every transport answers with; only `httpx_wire` knows httpx."""
