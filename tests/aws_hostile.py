"""Commands that try to read files, reach other addresses and other accounts, learn credentials or run programs.

`commands(canary, other)` gives them all: `canary` is a file with a secret, `other` the port of another account.
"""

from __future__ import annotations

BIG = "A" * 1_000_000
FORBIDDEN_GLOBALS = (
    "--endpoint-url", "--endpoint", "--endpoint-ur", "--end", "--ca-bundle", "--ca-bundl", "--profile", "--prof",
    "--cli-read-timeout", "--cli-connect-timeout", "--color", "--v2-debug")
FLAGS = (
    "--debug", "--deb", "--no-verify-ssl", "--no-sign-request", "--no-sign", "--version", "--generate-cli-skeleton",
    "--generate-cli", "--cli-auto-prompt")
INPUTS = ("--cli-input-json", "--cli-input-yaml", "--cli-input", "--cli-inp", "--cli-binary-format")
SHELL = (
    "| cat", "; cat /etc/passwd", "&& id", "& id", "> /tmp/aws-out", ">> /tmp/aws-out", "< /etc/passwd", "$(id)", "`id`",
    '"$(id)"', '"`id`"', "$HOME", '"$HOME"', "${HOME}", "|| id", "2>&1", "(id)")
LOCAL_S3 = (
    "cp {f} s3://data/x", "cp s3://data/x {f}", "cp s3://data/x -", "cp - s3://data/x", "mv {f} s3://data/x",
    "sync {d} s3://data", "sync s3://data {d}", "presign s3://data/x", "website s3://data", "ls {f}", "mb {f}", "rb {f}",
    "rm {f}", "rm -r {f}", "ls {d} --recursive", "mb data --endpoint-url http://127.0.0.1:{o}",
    "ls --endpoint-url=http://127.0.0.1:{o}", "ls --profile canary", "mb s3://../etc", "rm s3://data/x {f}",
    "cp --recursive {d} s3://data", "rb s3://data --force --endpoint-url=http://127.0.0.1:{o}", "", "help",
    "ls s3://data --debug", "ls http://127.0.0.1:{o}/", "mb s3://a/b/c", "ls s3://data/?x#y --recursive --page-size 1")
OTHER_COMMANDS = (
    "configure list", "configure get aws_access_key_id", "configure set region x", "configure export-credentials",
    "configure import --csv file://{f}", "sso login", "login", "history list", "history show", "cli-dev x",
    "lambda list-functions", "lambda invoke --function-name f /dev/stdout",
    "lambda create-function --function-name f --zip-file fileb://{f} --handler h --role r --runtime python3.11",
    "ecs list-clusters", "eks update-kubeconfig --name x", "cloudformation deploy --template-file {f}",
    "cloudformation package --template-file {f}", "codebuild list-projects", "deploy push --source {d}",
    "ssm start-session --target i-1", "ssm send-command --document-name x",
    "iam create-virtual-mfa-device --virtual-mfa-device-name x --outfile {f} --bootstrap-method QRCodePNG",
    "sts assume-role --role-arn a --role-session-name b", "sts get-session-token", "iam get-account-authorization-details",
    "emr ssh --cluster-id j --key-pair-file {f}", "ecr get-login", "codecommit credential-helper get",
    "rds generate-db-auth-token", "logs tail /x", "logs start-live-tail", "dynamodb wait table-exists --table-name t",
    "ec2 wait x", "s3api wait bucket-exists --bucket b", "imds get", "bedrock-runtime invoke-model --model-id m {f}",
    "apigateway get-export x", "transfer start", "states start-execution", "firehose list-delivery-streams",
    "sns create-platform-application --name x", "ec2 get-password-data --priv-launch-key {f}",
    "s3api create-multipart-upload --bucket _ministack --key reset", "s3api upload-part --body {f}",
    "s3api select-object-content --bucket b --key k /dev/stdout", "s3control list-jobs", "account x", "../../bin/sh x")


def commands(canary: str, other: int) -> list[str]:
    """More than 200 lines, none of which may succeed."""
    folder, lines = canary.rpartition("/")[0], []
    list_buckets, other_url = "aws s3api list-buckets", f"http://127.0.0.1:{other}"
    for name in FORBIDDEN_GLOBALS:
        for value in (other_url, canary):
            lines += [
                f"{list_buckets} {name} {value}", f"{list_buckets} {name}={value}", f"aws {name} {value} s3api list-buckets",
                f"aws {name}={value} s3api list-buckets"]
    lines += [line for flag in FLAGS for line in (f"{list_buckets} {flag}", f"aws {flag} s3api list-buckets")]
    for name in INPUTS:
        lines += [
            f"{list_buckets} {name} file://{canary}", f'{list_buckets} {name} {{"Bucket":"x"}}',
            f"{list_buckets} {name}={canary}"]
    lines += [f"{list_buckets} {tail}" for tail in SHELL] + [
        f"{list_buckets}{tail}" for tail in ("|cat", ";id", "&&id", ">x", "`id`")
    ]
    lines += ["aws s3 " + line.format(f=canary, d=folder, o=other) for line in LOCAL_S3 if line != "help"]
    lines += ["aws " + line.format(f=canary, d=folder, o=other) for line in OTHER_COMMANDS]
    lines += _reads(canary) + _addresses(other_url, other) + _malformed()
    return list(dict.fromkeys(lines))


def _reads(f: str) -> list[str]:
    """Files by every way into a parameter."""
    put = "aws dynamodb put-item --table-name t --item"
    role = "aws iam create-role --role-name r --assume-role-policy-document"
    item = '{"a": {"S": "%s"}}'
    ways = [
        f"file://{f}", f"fileb://{f}", f"FILE://{f}", f"File://{f}", f"file:{f}", f"file:/{f}", f" file://{f}",
        f"\tfile://{f}"]
    lines = [f"{role} '{way}'" for way in ways] + [f"{role}='{way}'" for way in ways[:4]]
    lines += [f"{put} '{item % way}'" for way in ways[:4]] + [
        f"{put} 'a={{S=file://{f}}}'", f"{put} 'a={{S@=file://{f}}}'", f"{put} 'a@=file://{f}'",
        f"{put} a={{S@='file://{f}'}}", f"{put} 'a={{S@=\"file://{f}\"}}'", f"{put} @{f}", f"{put} {f}"]
    lines += [
        f"aws s3api put-bucket-tagging --bucket logs --tagging 'TagSet=[{{Key=a,Value@=file://{f}}}]'",
        f"aws s3api put-bucket-tagging --bucket logs --tagging 'TagSet=[{{Key=a,Value=file://{f}}}]'",
        f'aws s3api put-bucket-tagging --bucket logs --tagging \'{{"TagSet":[{{"Key":"a","Value":"file://{f}"}}]}}\'',
        f"aws s3api put-bucket-tagging --bucket logs --tagging 'TagSet@=file://{f}'",
        f"aws ssm put-parameter --name /a --type String --value fi'le'://{f}",
        f"aws ssm put-parameter --name /a --type String --value f\\ile://{f}",
        f"aws ssm put-parameter --name /a --type String --value \"file\"'://'{f}",
        f"aws ssm put-parameter --name /a --type String --value=file://{f}",
        f"aws kms encrypt --key-id k --plaintext fileb://{f}",
        f"aws sqs send-message --queue-url u --message-body file://{f}",
        f"aws sqs create-queue --queue-name q --attributes file://{f}",
        f"aws sqs create-queue --queue-name q --attributes a@=file://{f}",
        f"aws logs put-log-events --log-group-name g --log-stream-name s --log-events timestamp=1,message@=file://{f}",
        f"aws kinesis put-record --stream-name s --partition-key k --data fileb://{f}",
        f"aws sns publish --topic-arn t --message file://{f}", f"aws s3api put-object --bucket logs --key k --body {f}",
        f"aws s3api put-object --bucket logs --key k --body={f}",
        "aws s3api put-object --bucket logs --key k --body ~/.aws/credentials",
        f"aws s3api put-object --bucket logs --key k --bod {f}",
        f"aws s3api put-object --bucket logs --key k --body '' --body {f}",
        f"aws s3api put-object --bucket logs --key k {f}", f"aws s3api get-object --bucket logs --key k {f}",
        "aws s3api get-object --bucket logs --key k -", "aws s3api get-object --bucket logs --key k /tmp/aws-out",
        f"aws s3api get-object --bucket logs {f} --key k", "aws s3api get-object --bucket logs --key k ../../x",
        f"aws s3api get-object --bucket logs --key k {f} /dev/stdout",
        "aws s3api get-object --bucket logs --key k /dev/stdout/../x", f"aws --region file://{f} s3api list-buckets",
        f"aws s3api list-buckets --query file://{f}", f"aws s3api list-buckets --output file://{f}",
        f"aws iam create-user --user-name file://{f}"]
    return lines


def _addresses(url: str, other: int) -> list[str]:
    """Other addresses: by region, by ARN, by bucket, by path."""
    buckets = (
        "arn:aws:s3:us-east-1:123456789012:accesspoint/ap", "arn:aws:s3:us-west-2:123456789012:accesspoint:ap",
        "arn:aws:s3::123456789012:accesspoint/abcdefghijklm.mrap",
        "arn:aws:s3-outposts:us-east-1:123456789012:outpost:op-1:accesspoint:ap",
        "arn:aws:s3-object-lambda:us-east-1:123456789012:accesspoint/ap", "data--use1-az4--x-s3", "..", "../..", ".", "/",
        "//evil.com", f"127.0.0.1:{other}", f"@127.0.0.1:{other}", f"x@127.0.0.1:{other}/", "_ministack", "_ministack/reset",
        "data?x", "data#x", "evil.com/", url, "%2e%2e", "data/../_ministack")
    regions = (
        f"x@127.0.0.1:{other}", "evil.com", "us-east-1.evil.com", "us-east-1/../", "us_east_1", "", "-", "us-east-1#",
        "us-east-1\\n", "а-east-1", "us-east-1 ", f"us-east-1@127.0.0.1:{other}", "a" * 300)
    lines = [f"aws s3api list-objects-v2 --bucket '{bucket}'" for bucket in buckets]
    lines += [f"aws s3 ls 's3://{bucket}'" for bucket in buckets[:4] + buckets[6:]]
    lines += [
        line for region in regions for line in (f"aws s3api list-buckets --region '{region}'", f"aws s3 ls --region='{region}'")
    ]
    lines += [
        "aws s3api put-object --bucket logs --key ../sneaky",
        "aws s3api get-object --bucket _ministack --key health /dev/stdout",
        "aws s3api put-object --bucket logs --key ../_ministack/reset",
        "aws s3api put-object --bucket logs --key a/../../_ministack/reset",
        "aws s3api delete-objects --bucket _ministack --delete Objects=[{Key=reset}]",
        "aws s3api delete-object --bucket logs --key ./x/../y", "aws route53 get-hosted-zone --id ../../_ministack/health",
        f"aws s3api get-object --bucket logs --key k {url}/x"]
    return lines


def _malformed() -> list[str]:
    """Lines that break parsers: sizes, control characters, quotes, depth, unicode."""
    deep = "[" * 7000 + "]" * 7000
    return [
        f"aws s3api create-bucket --bucket {BIG}", BIG, f"aws {BIG}", f"aws s3api {BIG}",
        f"aws s3api list-buckets --query {BIG}", f"aws dynamodb put-item --table-name t --item '{deep}'",
        f"aws s3api list-buckets --query '{deep}'", f"aws dynamodb put-item --table-name t --item '{'{' * 7000}'",
        "aws dynamodb put-item --table-name t --item 'a={" + "b={" * 4000 + "'",
        f"aws s3api list-buckets --query '{'(' * 8000}'", f"aws s3api list-buckets --query '{'!' * 9000}a'",
        "aws s3api create-bucket --bucket a\x00b", "aws s3api list-buckets\naws s3api list-buckets",
        "aws s3api list-buckets\r\nid", "aws s3api create-bucket --bucket '\x1b[2J'",
        "aws s3api create-bucket --bucket '\ud800'", "aws s3api create-bucket --bucket 'a\nb'",
        "aws s3api create-bucket --bucket \x7f", "", " ", "aws", "aws ", "AWS s3 ls", "aws\u00a0s3api list-buckets",
        "\u202eaws s3 ls", "aws --", "aws -- s3api", "aws s3api -- list-buckets", "aws s3api list-buckets --",
        "aws s3api create-bucket -- --bucket x", "aws s3api create-bucket --bucket", "aws s3api create-bucket --bucket ''",
        "aws s3api create-bucket --bucket 'a", 'aws s3api create-bucket --bucket "a', "aws s3api create-bucket \\",
        "aws dynamodb put-item --table-name t --item ''", "aws dynamodb put-item --table-name t --item ' '",
        "aws s3api list-buckets x", "aws s3api list-buckets --output yaml", "aws s3api list-buckets --output",
        "aws s3api list-buckets --query '['", "aws s3api list-buckets --query", "aws s3api list-buckets --query 'x(@)'",
        "aws sts get-caller-identity --query 'join(Account)'", "aws ѕ3api list-buckets", "aws s3api lіst-buckets",
        "sudo aws s3api list-buckets", "python -c 'import os'", "/usr/bin/aws s3api list-buckets", "aws.exe s3 ls",
        "bash -c 'aws s3 ls'", "aws s3api create-bucket --bucket ＦＩＬＥ：//etc/passwd", "aws s3api create-bucket --bucket ﹨",
        "env AWS_PROFILE=x aws s3 ls", "AWS_ENDPOINT_URL=http://127.0.0.1:1 aws s3 ls",
        "aws s3api get-bucket-tagging --bucket", "aws ssm get-parameter --name"]
