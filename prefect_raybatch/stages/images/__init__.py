"""Images of a row: fetched, checked, decoded and resized on a CPU, before any engine sees them."""
