"""What runs when the project is installed or its image is built, never in production."""
