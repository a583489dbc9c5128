"""The accounting database: all SQL is here."""

from gpuschedd.store.database import Store as Store
