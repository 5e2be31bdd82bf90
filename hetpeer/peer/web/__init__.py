"""The dashboard and the metrics, over HTTP."""
