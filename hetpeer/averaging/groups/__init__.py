"""Groups of clusters that average: which clusters, and when."""
