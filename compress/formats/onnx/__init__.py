"""ONNX files of anybody's: opened after they were looked through, outlined without their weights, walked with
scopes."""
