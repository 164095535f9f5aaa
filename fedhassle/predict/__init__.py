"""A trained model in use: loading, predicting, scoring, ONNX export."""
