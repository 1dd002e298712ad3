"""Export to ONNX, and running such files."""
