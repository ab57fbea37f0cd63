"""The object tier: runs of blocks as objects in a store that all nodes share."""

from distserve_kvstore.objects.runs import ObjectHeader, ObjectOptions, ObjectRun
from distserve_kvstore.objects.tier import ObjectTier

__all__ = ["ObjectHeader", "ObjectOptions", "ObjectRun", "ObjectTier"]
