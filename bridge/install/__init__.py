"""Programs for the installation of the project and the build of its image; they never run in production."""
