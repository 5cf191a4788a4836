"""What the world sees: logs, metrics, the HTTP endpoints and systemd. All of it listens to `events`."""
