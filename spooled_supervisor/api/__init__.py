"""The service's protocol. `values` is what every transport answers with; `exchange` is the only module that knows httpx."""
