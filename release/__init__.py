"""What a release holds beside the code: the image and what is in it, and the generated parts of the Helm chart and of
docs/messages.md.
"""
