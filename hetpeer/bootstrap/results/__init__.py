"""What the author takes home: exports, and text by the trained model."""
