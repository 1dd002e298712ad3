"""Image files: sizes from headers, and pixels."""
