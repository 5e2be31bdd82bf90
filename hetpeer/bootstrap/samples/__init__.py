"""From the author's files to samples: formats, records, tokens. Runs only on the author's machine."""
