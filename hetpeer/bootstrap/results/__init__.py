"""Results for the author: exports, and text by the trained model."""
