"""The model servers behind the gateway: balancing, outliers, metadata, sequences."""
