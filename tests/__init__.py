import legato_service  # noqa: F401 - before grpc, which is to be set up as it is when it serves
