"""Generated from node.proto by scripts/protobuf.py. Edit the .proto, run that, commit both."""
