"""What tests share: oracles, small models, stand-ins, helpers."""
