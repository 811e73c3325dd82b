"""What clients reach over HTTP: connections, requests, inference the short and the long way, routes."""
