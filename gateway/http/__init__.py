"""HTTP/1.1 towards clients and replicas: parser, connection pool, flow control. Nothing here is specific to LLMs."""
