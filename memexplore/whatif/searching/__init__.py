"""Many settings: sweeps over processes, and the search for what fits."""
