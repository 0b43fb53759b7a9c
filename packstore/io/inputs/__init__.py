"""io.inputs."""
