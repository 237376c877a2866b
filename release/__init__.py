"""The parts of a release beside the code: the image and its contents, and the generated parts of the Helm chart and the
documents.
"""
