"""HTTP/1.1 to clients and replicas: parsing, connection pools, flow control. Nothing here is specific to LLMs."""
