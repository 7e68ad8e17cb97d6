"""Images of a row: fetched, checked, decoded and sized on a CPU, before any engine sees them."""
