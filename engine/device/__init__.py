"""The devices that models run on: what they can do, and the thread or stream that orders their work."""
