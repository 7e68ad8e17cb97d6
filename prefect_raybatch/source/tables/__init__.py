"""Tables of other systems as input, each opened at one version and copied once: see `base`."""
