"""The text book: a rollout client that keeps every rule of spec/README.md, SHOULD rules included.

Read it in this order: `budget` (the arithmetic), `sample` (what is kept),
`generate` (one plain attempt), `generate_streaming` (one streamed attempt),
`client` (HTTP, retries, server-sent events), `source` (groups of samples),
`rollout` (the loop around it all).
"""

import logging

logging.getLogger(__name__).addHandler(logging.NullHandler())  # who uses a library says where its warnings go
