"""From a captured graph and a plan to the graphs one rank runs."""
