"""HTTP/1.1 on both sides: parser, pool, flow control. Knows no LLMs."""
