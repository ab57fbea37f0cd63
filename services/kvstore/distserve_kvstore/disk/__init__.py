"""The disk tier: blocks in segment files of one folder."""

from distserve_kvstore.disk.records import DiskOptions, DiskStats, Record, RecoveredRun
from distserve_kvstore.disk.tier import DiskTier

__all__ = ["DiskOptions", "DiskStats", "DiskTier", "Record", "RecoveredRun"]
