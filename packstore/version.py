"""The version of packstore: its only home."""

VERSION = "0.1.0"
