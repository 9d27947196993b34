"""Pages that need no kernel: `report` writes a tape as one HTML file."""
