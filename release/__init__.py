"""What a release holds beside the code: the image, what it leaves out and what is in it, and the generated parts of the
Helm chart."""
