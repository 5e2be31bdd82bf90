"""The pure core of a volunteer: from the handshake to the applied update."""
