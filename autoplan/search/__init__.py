"""From a graph and a cluster to the best plan, with its proof."""
