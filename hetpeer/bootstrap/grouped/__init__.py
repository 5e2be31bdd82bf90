"""Runs of clusters that train batches of their own and average."""
