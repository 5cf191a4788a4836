"""The service's gRPC interface: `spooled.proto`, and the modules that are generated from it.

They need the extra `grpc` (protobuf, grpcio), so nothing here is imported before a gRPC address is really used.
"""
