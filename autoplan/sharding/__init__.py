"""Every op's legal partitions, from factor rules."""
