"""The store of clients' responses, files and batches, in one SQL database that gateways may share.

database  the SQL databases that may be used
store     one database, its tables, and the thread on which it is used
"""
