"""Connects with each Python driver and prints `driver SQLSTATE` a line."""

import asyncio
import sys

import asyncpg
import pg8000.dbapi
import psycopg

port, user = int(sys.argv[1]), sys.argv[2]
target = {"host": "127.0.0.1", "port": port, "user": user}


def with_psycopg():
    try:
        psycopg.connect(**target, dbname="prod").close()
        return "in"
    except psycopg.OperationalError as error:
        # Before a connection exists psycopg has libpq's text and no SQLSTATE.
        return error.sqlstate or ("53300" if "too many connections" in str(error) else str(error))


async def with_asyncpg():
    try:
        await (await asyncpg.connect(**target, database="prod")).close()
        return "in"
    except asyncpg.TooManyConnectionsError as error:
        return error.sqlstate


def with_pg8000():
    try:
        pg8000.dbapi.connect(**target, database="prod").close()
        return "in"
    except pg8000.dbapi.DatabaseError as error:
        return error.args[0]["C"]


print("psycopg", with_psycopg())
print("asyncpg", asyncio.run(with_asyncpg()))
print("pg8000", with_pg8000())
