"""The nets, and the operations that keep them exact on a canvas."""
