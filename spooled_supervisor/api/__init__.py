"""The service's protocol. `values` is what every transport answers with; `rest` is the only module that knows httpx."""
