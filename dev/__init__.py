"""What demo, bench and tests share: a real broker and the harness around the bridge; no part of the product."""
