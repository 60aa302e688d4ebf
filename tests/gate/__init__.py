"""What clients send, and what the mock lets through, against the request gate of SGLang 0.5.23 itself."""
